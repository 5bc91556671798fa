// The products of a step, as a list of types.
#pragma once

namespace megamoe {

template <typename... All>
struct ProductList {
  // These and more behind them.
  template <typename... More>
  using With = ProductList<All..., More...>;

  // K-blocks of all of them together.
  template <typename Params, typename Item>
  static __device__ __forceinline__ int NumKBlocks(const Params& p, const Item& item) {
    return (All::NumKBlocks(p, item) + ...);
  }
};

}  // namespace megamoe
