// The descriptions that torch_npu's older way of calling operators puts together: tensors, buffers,
// attributes, options. They are kept or dropped as asked, since none of them computes anything;
// aclopCompileAndExecute, which would, isn't implemented and returns an error.
#include <acl/acl_op_compiler.h>

#include "runtime.h"

struct aclTensorDesc {
  aclDataType dtype;
  aclFormat format;
  std::vector<int64_t> sizes;
};
struct aclDataBuffer {};
struct aclopAttr {};

aclTensorDesc* aclCreateTensorDesc(aclDataType dtype, int rank, const int64_t* sizes,
                                   aclFormat format) {
  return new aclTensorDesc{dtype, format, {sizes, sizes + rank}};
}

void aclDestroyTensorDesc(const aclTensorDesc* desc) { delete desc; }

aclDataType aclGetTensorDescType(const aclTensorDesc* desc) { return desc->dtype; }

aclFormat aclGetTensorDescFormat(const aclTensorDesc* desc) { return desc->format; }

size_t aclGetTensorDescNumDims(const aclTensorDesc* desc) { return desc->sizes.size(); }

aclError aclGetTensorDescDimV2(const aclTensorDesc* desc, size_t index, int64_t* size) {
  if (index >= desc->sizes.size()) {
    return sim::fail(ACL_ERROR_RT_PARAM_INVALID, "dimension ", index, " of a description with ",
                     desc->sizes.size());
  }
  *size = desc->sizes[index];
  return ACL_SUCCESS;
}

void aclSetTensorDescName(aclTensorDesc*, const char*) {}

aclError aclSetTensorFormat(aclTensorDesc* desc, aclFormat format) {
  desc->format = format;
  return ACL_SUCCESS;
}

aclError aclSetTensorShape(aclTensorDesc* desc, int rank, const int64_t* sizes) {
  desc->sizes.assign(sizes, sizes + rank);
  return ACL_SUCCESS;
}

aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }

aclDataBuffer* aclCreateDataBuffer(void*, size_t) { return new aclDataBuffer; }

aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

aclopAttr* aclopCreateAttr() { return new aclopAttr; }

void aclopDestroyAttr(const aclopAttr* attribute) { delete attribute; }

aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) {
  return ACL_SUCCESS;
}

// Options of a compiler that isn't there.
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
