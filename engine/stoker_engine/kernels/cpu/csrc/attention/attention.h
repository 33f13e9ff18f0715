// Arguments of stoker_attention, mirrored by `attention.py`. Strides are in elements.
#pragma once

#include <cstdint>

// A step's sequences, and the block tables and new tokens' slots in one KV cache group.
struct AttentionStep {
  long block_size;
  long tokens, sequences;
  const int32_t *query_starts, *seq_lens, *tables;
  long table_stride;
  const int64_t* slots;
};

struct AttentionCall : AttentionStep {
  long is_bf16;  // whether queries, new keys and values, and the result are bf16 instead of float
  // Constants of a layer.
  long heads, kv_heads, head_dim, value_dim, window;  // window 0: none
  float scale, soft_cap;                              // soft_cap 0: none
  const float* alibi_slopes;                          // [heads], or null
  const float* sinks;                                 // [heads], or null
  // The flat batch: queries [tokens, heads, head_dim], new keys and values [tokens, kv_heads, …] (`new_values` is null
  // if they are part of the keys), and the contiguous result [tokens, heads, value_dim].
  const void* query;
  long query_token, query_head;
  const void* new_keys;
  long new_key_token, new_key_head;
  const void* new_values;
  long new_value_token, new_value_head;
  void* out;
  // The cache [blocks, block_size, kv_heads, …]; `stored` is a Stored of kv_dtypes.h.
  long stored;
  void* keys;
  long key_block, key_slot, key_head;
  void* values;
  long value_block, value_slot, value_head;
  // Scales of 8-bit elements [blocks, block_size, kv_heads]; null for other dtypes. With `scales_of_tokens` they are
  // computed when tokens are stored, otherwise only read.
  long scales_of_tokens;
  float* key_scales;
  long key_scale_block, key_scale_slot, key_scale_head;
  float* value_scales;
  long value_scale_block, value_scale_slot, value_scale_head;
};

// Stores the new keys and values, then computes attention.
void attention(const AttentionCall& call);
