// Compiles if csrc/npu/acl.h declares AscendCL as the wheel's headers do. Handles and enumerations
// have names of their own there, so functions are compared by what is passed: addresses, and
// integers of a size; and structs by where their members lie.
#include <acl/acl.h>

#include <cstddef>
#include <type_traits>

#include "npu/acl.h"

namespace {

template <class T>
struct PassedAs {
  using type = T;
};
template <class T>
struct PassedAs<T*> {
  using type = void*;
};
template <class T>
  requires std::is_enum_v<T>
struct PassedAs<T> {
  using type = std::underlying_type_t<T>;
};

template <class F>
struct Signature;
template <class R, class... Parameters>
struct Signature<R (*)(Parameters...)> {
  using type = typename PassedAs<R>::type (*)(typename PassedAs<Parameters>::type...);
};

template <class Ours, class Theirs>
constexpr bool same =
    std::is_same_v<typename Signature<Ours>::type, typename Signature<Theirs>::type>;

using paged::npu::Acl;
using paged::npu::LaunchAttribute;
using paged::npu::LaunchConfiguration;

#define CHECK_SIGNATURE(name) static_assert(same<decltype(Acl::name), decltype(&::name)>)

CHECK_SIGNATURE(aclrtGetSocName);
CHECK_SIGNATURE(aclGetRecentErrMsg);
CHECK_SIGNATURE(aclrtGetDeviceInfo);
CHECK_SIGNATURE(aclrtBinaryLoadFromFile);
CHECK_SIGNATURE(aclrtBinaryGetFunction);
CHECK_SIGNATURE(aclrtKernelArgsInit);
CHECK_SIGNATURE(aclrtKernelArgsAppend);
CHECK_SIGNATURE(aclrtKernelArgsAppendPlaceHolder);
CHECK_SIGNATURE(aclrtKernelArgsGetPlaceHolderBuffer);
CHECK_SIGNATURE(aclrtKernelArgsFinalize);
CHECK_SIGNATURE(aclrtLaunchKernelWithConfig);

static_assert(sizeof(LaunchAttribute) == sizeof(aclrtLaunchKernelAttr));
static_assert(offsetof(LaunchAttribute, id) == offsetof(aclrtLaunchKernelAttr, id));
static_assert(offsetof(LaunchAttribute, schedule) == offsetof(aclrtLaunchKernelAttr, value));
static_assert(sizeof(LaunchConfiguration) == sizeof(aclrtLaunchKernelCfg));
static_assert(offsetof(LaunchConfiguration, count) == offsetof(aclrtLaunchKernelCfg, numAttrs));
static_assert(paged::npu::kScheduleAttribute == ACL_RT_LAUNCH_KERNEL_ATTR_SCHEM_MODE);
static_assert(paged::npu::kCubeCores == ACL_DEV_ATTR_CUBE_CORE_NUM);
static_assert(paged::npu::kVectorCores == ACL_DEV_ATTR_VECTOR_CORE_NUM);
static_assert(paged::npu::kArchitecture == ACL_DEV_ATTR_NPU_ARCH);

}  // namespace
