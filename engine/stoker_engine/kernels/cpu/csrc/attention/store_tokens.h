// Stores new keys and values in their slots of the paged cache, in its storage format.
#pragma once

#include "attention/attention.h"
#include "attention/kv_dtypes.h"
#include "common/threads.h"

namespace {

// Source and destination of new keys or values.
struct Rows {
  const void* from;
  long token, head;  // strides
  void* to;
  long block, slot, to_head;
  float* scales;
  long scale_block, scale_slot, scale_head;
  long width;
};

// The scale that makes a vector's largest magnitude `largest`; 1 if all elements are 0, NaN if one is NaN or infinite.
template <class T>
inline float scale_of(const T* from, long width, float largest) {
  Vec maxima{}, nan_or_zero{};
  for (long d = 0; d < width; d += LANES) {
    const Vec v = load_up_to(from + d, width - d);
    maxima = larger(maxima, larger(v, -v));
    nan_or_zero += v - v;  // 0, or NaN
  }
  const float scale = max_of(maxima) / largest + sum_of(nan_or_zero);
  return scale == 0 ? 1 : scale;
}

template <class S, class T>
inline void store_scaled(S* to, const T* from, float scale, long width) {
  const Vec largest = broadcast(S::LARGEST), divisor = broadcast(scale);
  for (long d = 0; d < width; d += LANES) {
    const Vec x = load_up_to(from + d, width - d);
    Vec v = x / divisor;
    v = v > largest ? largest : v;
    v = v < -largest ? -largest : v;
    store_up_to(to + d, v + (x - x), width - d);
  }
}

template <class T, class S>
void store_rows(const AttentionCall& call, const Rows& rows) {
  parallel_for(call.tokens >= 128, call.tokens, [&](long t) {
    const long block = call.slots[t] / call.block_size, slot = call.slots[t] % call.block_size;
    for (long h = 0; h < call.kv_heads; h++) {
      const T* from = (const T*)rows.from + t * rows.token + h * rows.head;
      S* to = (S*)rows.to + block * rows.block + slot * rows.slot + h * rows.to_head;
      if constexpr (sizeof(S) == 1) {
        float* scale = rows.scales + block * rows.scale_block + slot * rows.scale_slot + h * rows.scale_head;
        if (call.scales_of_tokens) *scale = scale_of(from, rows.width, S::LARGEST);
        store_scaled(to, from, *scale, rows.width);
      } else if constexpr (sizeof(S) == sizeof(T)) {
        memcpy((void*)to, from, rows.width * sizeof(T));
      } else {
        for (long d = 0; d < rows.width; d += LANES)
          store_up_to(to + d, load_up_to(from + d, rows.width - d), rows.width - d);
      }
    }
  });
}

template <class T>
void store_all(const AttentionCall& c, const Rows& rows) {
  switch (c.stored) {
    case FLOAT: return store_rows<T, float>(c, rows);
    case BF16: return store_rows<T, bf16>(c, rows);
    case E4M3: return store_rows<T, e4m3>(c, rows);
    case E5M2: return store_rows<T, e5m2>(c, rows);
    case INT8: return store_rows<T, int8>(c, rows);
  }
}

template <class T>
void store_new(const AttentionCall& c) {
  store_all<T>(c, {c.new_keys, c.new_key_token, c.new_key_head, c.keys, c.key_block, c.key_slot, c.key_head,
                   c.key_scales, c.key_scale_block, c.key_scale_slot, c.key_scale_head, c.head_dim});
  if (c.new_values)
    store_all<T>(
        c, {c.new_values, c.new_value_token, c.new_value_head, c.values, c.value_block, c.value_slot, c.value_head,
            c.value_scales, c.value_scale_block, c.value_scale_slot, c.value_scale_head, c.value_dim});
}

}  // namespace
