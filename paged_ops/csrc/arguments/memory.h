// Which bytes a strided tensor has, and whether two tensors, or two elements of one, share any.
//
// The bytes of a tensor are the sums begin + x_1 s_1 + ... + x_n s_n + b with 0 <= x_i < size_i,
// where b counts the bytes of an element. So whether two tensors share one is whether a number can
// be written as a sum of given steps, each taken a limited number of times: a bounded linear
// equation, which is solved exactly. Steps that both tensors have count as one, and as soon as the
// steps left reach every number in their range, the answer is known: for tensors whose dimensions
// lie within one another, as those of a pool do, after a few trials. Strides made up to be hard
// could take for ever, so after kMostTrials the answer is "yes".
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>

namespace paged {

// Of any argument of an op.
inline constexpr int64_t kMostRank = 4;

// Steps of `size` bytes, of which 0 to `most` are taken.
struct Steps {
  int64_t size;
  int64_t most;
};

// Whether `target` is a sum of steps.
class StepSums {
 public:
  void add(Steps steps) {
    if (steps.most <= 0 || steps.size == 0) return;
    for (int64_t i = 0; i < count_; ++i) {
      if (steps_[i].size == steps.size) {
        steps_[i].most += steps.most;
        return;
      }
    }
    int64_t at = count_++;
    for (; at > 0 && steps_[at - 1].size < steps.size; --at) steps_[at] = steps_[at - 1];
    steps_[at] = steps;
  }

  // True also where kMostTrials don't suffice to tell.
  bool reach(int64_t target) {
    rests_[count_] = {0, 0, true};
    for (int64_t i = count_ - 1; i >= 0; --i) {
      const Steps& steps = steps_[i];
      const Rest& less = rests_[i + 1];
      const int64_t divisor = std::gcd(steps.size, less.divisor);
      const bool leaves_no_gap =
          less.is_all && (less.divisor == 0 || steps.size % less.divisor == 0);
      rests_[i] = {divisor, less.sum + steps.size * steps.most,
                   leaves_no_gap && (less.divisor == 0 || steps.size <= less.sum + less.divisor)};
    }
    trials_ = 0;
    return reach_from(0, target);
  }

 private:
  // The sums of steps i, i + 1, ...: multiples of `divisor` up to `sum`, and all of these or not.
  struct Rest {
    int64_t divisor;
    int64_t sum;
    bool is_all;
  };

  bool reach_from(int64_t i, int64_t target) {
    const Rest& rest = rests_[i];
    if (target < 0 || target > rest.sum) return false;
    if (rest.divisor == 0) return target == 0;
    if (target % rest.divisor != 0) return false;
    if (rest.is_all) return true;
    const Steps& steps = steps_[i];
    const int64_t above = target - rests_[i + 1].sum;
    int64_t taken = above <= 0 ? 0 : (above - 1) / steps.size + 1;
    const int64_t most = std::min(steps.most, target / steps.size);
    for (; taken <= most; ++taken) {
      if (++trials_ > kMostTrials || reach_from(i + 1, target - taken * steps.size)) return true;
    }
    return false;
  }

  // A fraction of a millisecond.
  static constexpr int64_t kMostTrials = 20000;
  // Those of two tensors, and the bytes of an element.
  static constexpr int64_t kMostSteps = 2 * kMostRank + 1;

  std::array<Steps, kMostSteps> steps_;  // from the largest on
  std::array<Rest, kMostSteps + 1> rests_;
  int64_t count_ = 0;
  int64_t trials_ = 0;
};

// The memory of a tensor of up to kMostRank dimensions.
class Memory {
 public:
  // Elements of `element` bytes; strides count `unit` bytes.
  template <class Sizes>
  Memory(const void* begin, int64_t element, const Sizes& sizes, const Sizes& strides, int64_t unit)
      : begin_(reinterpret_cast<intptr_t>(begin)), element_(element), is_empty_(false) {
    last_ = begin_ + element - 1;
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      is_empty_ |= sizes[dim] == 0;
      if (sizes[dim] <= 1) continue;
      const Steps steps = {strides[dim] * unit, sizes[dim] - 1};
      int64_t at = rank_++;
      for (; at > 0 && dims_[at - 1].size > steps.size; --at) dims_[at] = dims_[at - 1];
      dims_[at] = steps;
      last_ += strides[dim] * unit * (sizes[dim] - 1);
    }
  }

  bool shares_with(const Memory& other) const {
    if (is_empty_ || other.is_empty_) return false;
    if (last_ < other.begin_ || other.last_ < begin_) return false;
    StepSums sums;
    sums.add({1, element_ - 1 + other.element_ - 1});
    for (int64_t i = 0; i < rank_; ++i) sums.add(dims_[i]);
    for (int64_t i = 0; i < other.rank_; ++i) sums.add(other.dims_[i]);
    // A byte of this tensor lies `x` above its begin, one of the other `y` below its last.
    return sums.reach(other.last_ - begin_);
  }

  // Whether two elements share memory.
  bool shares_with_itself() const {
    if (is_empty_) return false;
    int64_t span = element_;
    bool is_nested = true;
    for (int64_t i = 0; i < rank_; ++i) {
      is_nested &= dims_[i].size >= span;
      span += dims_[i].size * dims_[i].most;
    }
    return !is_nested && repeats_a_byte();
  }

 private:
  // Two elements differ last in some dimension i, in which one is taken a step or more above the
  // other, and are anywhere relative to each other in the dimensions before it.
  bool repeats_a_byte() const {
    for (int64_t i = 0; i < rank_; ++i) {
      StepSums sums;
      int64_t target = element_ - 1 - dims_[i].size;
      sums.add({1, 2 * (element_ - 1)});
      if (dims_[i].size == 0) return true;
      for (int64_t j = 0; j < i; ++j) {
        sums.add({dims_[j].size, 2 * dims_[j].most});
        target += dims_[j].size * dims_[j].most;
      }
      sums.add({dims_[i].size, dims_[i].most - 1});
      if (sums.reach(target)) return true;
    }
    return false;
  }

  intptr_t begin_;
  intptr_t last_;  // the last byte
  int64_t element_;
  int64_t rank_ = 0;                   // dimensions of 2 or more
  std::array<Steps, kMostRank> dims_;  // from the smallest steps on
  bool is_empty_;
};

}  // namespace paged
