// What merge_states takes.
#pragma once

#include "arguments/argument.h"

namespace paged {

// Members are taken in their order, which is that of the schema.
struct MergeStatesInputs {
  Stack& stack;
  Argument out_a = stack.tensor("out_a");
  Argument lse_a = stack.tensor("lse_a");
  Argument out_b = stack.tensor("out_b");
  Argument lse_b = stack.tensor("lse_b");
};

// Everything but where the results go.
inline MergeStatesParams check_merge_states(const Checks& checks, const MergeStatesInputs& in) {
  for (const Argument* arg : {&in.out_a, &in.out_b, &in.lse_a, &in.lse_b}) checks.readable(*arg);
  MergeStatesParams params = {};
  params.dtype = checks.element(in.out_a);
  checks.dtype(in.out_b, in.out_a.dtype, " like out_a");
  for (const Argument* out : {&in.out_a, &in.out_b}) {
    checks.rank(*out, 3, "[num_tokens, num_heads, head_dim_v]");
    checks.same_device(*out, in.out_a);
    checks.dense_last(*out);
    for (int64_t dim = 0; dim < 3; ++dim)
      checks.size(*out, dim, in.out_a.size(dim), "the shape of out_a");
  }
  for (const Argument* lse : {&in.lse_a, &in.lse_b}) {
    checks.rank(*lse, 2, "[num_tokens, num_heads]");
    checks.dtype(*lse, ScalarType::Float);
    checks.same_device(*lse, in.out_a);
    checks.size(*lse, 0, in.out_a.size(0), "num_tokens of out_a");
    checks.size(*lse, 1, in.out_a.size(1), "num_heads of out_a");
  }
  params.num_tokens = in.out_a.size(0);
  params.num_heads = in.out_a.size(1);
  params.head_dim = in.out_a.size(2);
  params.out_a = rows_of(in.out_a);
  params.out_b = rows_of(in.out_b);
  params.lse_a = rows_of(in.lse_a);
  params.lse_b = rows_of(in.lse_b);
  return params;
}

}  // namespace paged
