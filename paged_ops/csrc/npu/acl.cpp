#include "npu/acl.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace paged::npu {
namespace {

constexpr const char* kLibrary = "libascendcl.so";

template <class F>
void find_optional(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));
}

template <class F>
void find(void* library, const char* name, F*& function) {
  find_optional(library, name, function);
  if (function == nullptr) {
    throw std::runtime_error(std::string(kLibrary) + " has no " + name +
                             ", expected CANN 8.5 or later");
  }
}

Acl load() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("CANN can't be used: ") + dlerror());
  Acl found;
  find(library, "aclrtGetSocName", found.aclrtGetSocName);
  find(library, "aclGetRecentErrMsg", found.aclGetRecentErrMsg);
  find_optional(library, "aclrtGetDeviceInfo", found.aclrtGetDeviceInfo);
  find(library, "aclrtBinaryLoadFromFile", found.aclrtBinaryLoadFromFile);
  find(library, "aclrtBinaryGetFunction", found.aclrtBinaryGetFunction);
  find(library, "aclrtKernelArgsInit", found.aclrtKernelArgsInit);
  find(library, "aclrtKernelArgsAppend", found.aclrtKernelArgsAppend);
  find(library, "aclrtKernelArgsAppendPlaceHolder", found.aclrtKernelArgsAppendPlaceHolder);
  find(library, "aclrtKernelArgsGetPlaceHolderBuffer", found.aclrtKernelArgsGetPlaceHolderBuffer);
  find(library, "aclrtKernelArgsFinalize", found.aclrtKernelArgsFinalize);
  find(library, "aclrtLaunchKernelWithConfig", found.aclrtLaunchKernelWithConfig);
  return found;
}

}  // namespace

const Acl& acl() {
  static const Acl loaded = load();
  return loaded;
}

void check_acl(AclError error, const char* call) {
  if (error == 0) return;
  const char* text = acl().aclGetRecentErrMsg();
  throw std::runtime_error(std::string(call) + " returned " + std::to_string(error) +
                           (text == nullptr ? std::string() : std::string(": ") + text));
}

}  // namespace paged::npu
