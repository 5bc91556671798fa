// Faults that a test build can be told to have, to prove that the tests find such faults.
//
// Each is a mistake that a kernel like this one could hold and still run; it is memory-safe, so
// that a wrong result is all that comes of it. Those of the kind "ordering" show only when events
// meet in an unlucky order.
#pragma once

#include <cstdint>

// name, kind, what the kernel then does. Their numbers count from 1; 0 is none.
#define MEGAMOE_SEEDED_FAULTS(F)                                                                \
  F(PublishBeforeStores, "ordering", "a tile is published before its stores are in memory")     \
  F(LoadBeforeInput, "ordering", "operands are loaded without a wait for who writes them")      \
  F(AnnounceBeforeCopies, "ordering", "rows are announced before their copies have ended")      \
  F(SumBeforeRows, "ordering", "a token is summed without a wait for its rows")                 \
  F(PadsNotZeroed, "rows and pads", "the dispatch leaves pads as memory was")                   \
  F(LastRowIsPad, "rows and pads", "the last row of each tile counts as a pad")                 \
  F(BlockOfPads, "rows and pads", "products over rows run to the end of the last tile")         \
  F(UnroutedNotZeroed, "rows and pads", "dx and dw of a token without a route are not set")     \
  F(DxWeighted, "gradient scale", "dx is multiplied by the router weight twice")                \
  F(DwDownUnweighted, "gradient scale", "dWd is summed without the router weight")              \
  F(SlopeOfRelu, "gradient scale", "the slope of silu is that of a ReLU")                       \
  F(DwWeighted, "gradient scale", "dw is multiplied by the router weight")                      \
  F(DyOfChoices, "operand and layout", "dy of a slot is read as if slots were [K, T]")          \
  F(GateAndUpSwapped, "operand and layout", "dg is multiplied by Wu and du by Wg")              \
  F(WeightsOfNextExpert, "operand and layout", "dh is made with Wd of the next expert")         \
  F(HalvesSwapped, "operand and layout", "the halves of a tile of dWd change places")           \
  F(EmptyExpertNotWritten, "accumulation and stale state", "an expert without rows gets no dW") \
  F(WeightsOfTileBefore, "accumulation and stale state",                                        \
    "odd tiles take the router weights that the block had before")                              \
  F(SumsInBf16, "accumulation and stale state", "dW is rounded to bf16 every 64 rows")          \
  F(TokensInBf16, "accumulation and stale state", "the sum of a token is rounded at each row")

namespace megamoe {

#define MEGAMOE_FAULT_NAME(name, kind, what) k##name,
enum class SeededFault : uint32_t { kNone, MEGAMOE_SEEDED_FAULTS(MEGAMOE_FAULT_NAME) };
#undef MEGAMOE_FAULT_NAME

#define MEGAMOE_FAULT_TEXT(name, kind, what) #name,
constexpr const char* kSeededFaultNames[] = {MEGAMOE_SEEDED_FAULTS(MEGAMOE_FAULT_TEXT)};
#undef MEGAMOE_FAULT_TEXT

}  // namespace megamoe
