// How elements are multiplied. Queries, keys and values are first rearranged into words of 32 bits (see workspace.h):
//
//   FloatArithmetic<K>   queries, weights and values are floats; a word of keys holds one float or two bf16 (K)
//   PairArithmetic       queries, keys, values and (rounded) weights are bf16, sums are floats; two products are added
//                        at a time. A word of values holds one element of each of two keys; if a row sees only one of
//                        them, the other's element becomes 0
//
// Keys whose values share a word are a unit: one key, or a pair.
#pragma once

#include "common/simd.h"
#include "gemm/amx_tiles.h"

namespace {

template <class K>
struct FloatArithmetic {
  typedef K Key;
  typedef float Word;                          // of queries and values
  typedef Vec ValueVec;                        // words of values
  static constexpr long WORD = 4 / sizeof(K);  // elements in a word of keys
  static constexpr long QUERY_WORDS = WORD;    // words of a query for one word of a key: one for each element
  static constexpr long UNIT = 1;              // keys in a unit
  static constexpr bool USES_AMX = false;
  static constexpr long SCORED_KEYS = LANES;  // keys that are scored together

  // The part of LANES keys' words that is multiplied with word i of a query: element i.
  static Vec part_of(WordVec keys, long i) {
    if constexpr (WORD == 1) return (Vec)keys;
    return (Vec)(i == 0 ? keys << 16 : keys & 0xffff0000u);
  }
  // Adds the products of LANES keys' parts with a word of a query to the scores.
  static Vec add_products(Vec scores, Vec keys, float query) { return scores + keys * query; }

  // Adds the products of values with a row's weight for their key to the sums.
  static Vec add_weighted(Vec sums, Vec values, const float* weight) { return sums + values * weight[0]; }

  // exp(scale × score - largest): the softmax's weights. The exponent is at most 0 except for rounding.
  static Vec weight_of(Vec score, float largest, float scale) { return exp_up_to_88(score * scale - largest); }
  static void put_weights(float* weights, long key, Vec p) { store(weights + key, p); }
};

struct PairArithmetic {
  typedef bf16 Key;
  typedef uint32_t Word;
  typedef WordVec ValueVec;
  static constexpr long WORD = 2, QUERY_WORDS = 1, UNIT = 2;
#if defined(STOKER_AMX)
  static constexpr bool USES_AMX = true;
  static constexpr long SCORED_KEYS = 2 * TILE_COLUMNS;
#else
  static constexpr bool USES_AMX = false;
  static constexpr long SCORED_KEYS = LANES;
#endif

#if defined(__AVX512BF16__)
  static WordVec part_of(WordVec keys, long) { return keys; }
  static Vec add_products(Vec sums, WordVec words, uint32_t word) {
    return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(word), (__m512bh)words);
  }
  static Vec add_weighted(Vec sums, WordVec values, const float* weights) {
    uint32_t word;
    memcpy(&word, weights, sizeof word);
    return add_products(sums, values, word);
  }

  // exp(scale × score - largest). Error: that of `power_of_2`, plus 2⁻²³ of the score.
  static Vec weight_of(Vec score, float largest, float scale) {
    constexpr float LOG2_E = 1.44269504f;
    return power_of_2(score * (scale * LOG2_E) - largest * LOG2_E);
  }
  static void put_weights(float* weights, long key, Vec p) { store((bf16*)weights + key, p); }
#endif
};

}  // namespace
