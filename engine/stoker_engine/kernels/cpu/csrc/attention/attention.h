// What a call of stoker_attention takes; `attention.py` mirrors it. Strides are in elements.
#pragma once

#include <cstdint>

// Where a step's sequences and one group's blocks lie.
struct AttentionStep {
  long block_size;
  long tokens, sequences;
  const int32_t *query_starts, *seq_lens, *tables;
  long table_stride;
  const int64_t* slots;
};

struct AttentionCall : AttentionStep {
  long is_bf16;  // queries, new keys and values, and the result; else they are floats
  // What is fixed for a layer.
  long heads, kv_heads, head_dim, value_dim, window;  // window 0: none
  float scale, soft_cap;                              // soft_cap 0: none
  const float* alibi_slopes;                          // [heads], or null
  const float* sinks;                                 // [heads], or null
  // The flat batch: queries [tokens, heads, head_dim], new keys and values [tokens, kv_heads, …] (values may be null:
  // they lie within the keys), and the result [tokens, heads, value_dim] without gaps.
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
  // What elements of 8 bits are multiplied by [blocks, block_size, kv_heads]; null for others. Those of tokens are made as
  // tokens are stored, others are there already.
  long scales_of_tokens;
  float* key_scales;
  long key_scale_block, key_scale_slot, key_scale_head;
  float* value_scales;
  long value_scale_block, value_scale_slot, value_scale_head;
};

// Stores the new keys and values, then attends.
void attention(const AttentionCall& call);
