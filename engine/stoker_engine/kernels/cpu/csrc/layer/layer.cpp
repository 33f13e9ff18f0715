// A decoder's layers in one call: attention and MLP, each with its norms, on one residual stream (see
// models/decoder.py). Results are bit-identical to those of the separate operations; one call saves a dozen calls for
// each layer, and the memory and page faults of their results. `layer.py` mirrors the structures.
#include "ops/activation.h"
#include "attention/attention.h"
#include "gemm/matrix.h"
#include "common/memory.h"
#include "gemm/gemm.h"
#include "ops/rms_norm.h"
#include "ops/rotary.h"
#include "attention/kv_dtypes.h"
#include "common/threads.h"

namespace {

struct Norm {
  const void* weight;  // null for no norm
  long is_wide;        // whether the weight is float32, independently of the model's dtype
  double eps;
};

struct Layer {
  long is_bf16, hidden;
  float multiplier;  // factor of results that are added to the stream
  Norm input_norm, q_norm, k_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm;
  Matrix qkv, out, up, down;
  long pairs, interleaved;  // rotated pairs in each head, 0 for no rotation; their layout
  long activation, gated;
  AttentionCall attention;  // the step, inputs and output are set in each call
};

// A layer, and its indices into `steps` and `cos_sin` (−1 for no rotation).
struct LayerEntry {
  const Layer* layer;
  long group, cos_sin;
};

struct RopeCosSin {
  const void *cos, *sin;  // [tokens, pairs]
};

// Number of rows of x for which an MLP's intermediate results fit into the cache.
constexpr long CHUNK = 256;

template <class T>
inline void norm_row(const Norm& norm, const T* from, T* to, long size) {
  if (norm.is_wide)
    rms_norm(from, (const float*)norm.weight, norm.eps, to, size);
  else
    rms_norm(from, (const T*)norm.weight, norm.eps, to, size);
}

// In steps of few tokens attention is bound by memory, so cached keys and values are prefetched during the QKV
// projection, as many bytes as the caches can keep until attention.
constexpr long FEW_TOKENS = 8;
constexpr long MAX_FETCHED_BYTES = 256 << 10;  // for each thread

// Returns the memory of the cached keys and values that a step attends to, up to the limit. A block's heads are
// adjacent, so they are one range.
inline const PrefetchRanges* cached_key_ranges(const AttentionCall& fixed, const AttentionStep& step) {
  static thread_local PrefetchRanges found;
  found.clear();
  const long size = size_of(fixed.stored), block_size = step.block_size, max_bytes = MAX_FETCHED_BYTES * threads();
  const auto bytes = [&](long slot, long head) { return size * std::max(block_size * slot, fixed.kv_heads * head); };
  const long key_bytes = bytes(fixed.key_slot, fixed.key_head), value_bytes = bytes(fixed.value_slot, fixed.value_head);
  for (long s = 0; s < step.sequences; s++) {
    const long end = step.seq_lens[s] - (step.query_starts[s + 1] - step.query_starts[s]);
    const long begin = fixed.window ? std::max(0l, end + 1 - fixed.window) : 0;
    for (long at = begin / block_size; at * block_size < end; at++) {
      if (found.lines * PrefetchRanges::LINE > max_bytes) return &found;
      const long block = step.tables[s * step.table_stride + at];
      const char* keys = (const char*)fixed.keys + block * fixed.key_block * size;
      const char* values = (const char*)fixed.values + block * fixed.value_block * size;
      found.add({keys, keys + key_bytes});
      found.add({values, values + value_bytes});
    }
  }
  return &found;
}

// Rows of x whose computation continues after a layer's attention, and their destination.
template <class T>
struct KeptRows {
  const int64_t* rows;  // ascending
  long count;           // −1 for all rows, in place
  T* stream;
  const int64_t* batch_rows;  // for these rows, see LinearArgs
};

template <class T>
void run(const Layer& layer, const AttentionStep& step, const T* x, const T* cos, const T* sin,
         const int64_t* batch_rows, const KeptRows<T>& kept) {
  const AttentionCall& fixed = layer.attention;
  const long tokens = step.tokens, hidden = layer.hidden, size = fixed.head_dim, width = layer.qkv.outputs;
  const long heads = fixed.heads, num_rotated = heads + fixed.kv_heads, chunk = std::min(tokens, CHUNK);
  const bool share_rows = tokens * hidden >= GRAIN_SIZE;
  static thread_local Memory memory;
  const long before_mlp = tokens * (width + layer.out.inner), within_mlp = chunk * layer.up.outputs;
  T* const normed = (T*)memory.of((tokens * hidden + std::max(before_mlp, within_mlp)) * sizeof(T));
  T* const qkv = normed + tokens * hidden;
  T* const attended = qkv + tokens * width;

  const T* input = x;
  if (layer.input_norm.weight) {
    parallel_for(share_rows, tokens,
                 [&](long t) { norm_row(layer.input_norm, x + t * hidden, normed + t * hidden, hidden); });
    input = normed;
  }
  const PrefetchRanges* prefetch_ranges = tokens <= FEW_TOKENS ? cached_key_ranges(fixed, step) : nullptr;
  linear(layer.is_bf16, layer.qkv, {input, hidden, qkv, width, tokens, prefetch_ranges, batch_rows});

  if (layer.q_norm.weight || layer.pairs)
    parallel_for(tokens * num_rotated * size >= GRAIN_SIZE, tokens, [&](long t) {
      for (long h = 0; h < num_rotated; h++) {
        T* head = qkv + t * width + h * size;
        const Norm& norm = h < heads ? layer.q_norm : layer.k_norm;
        if (norm.weight) norm_row(norm, head, head, size);
        if (layer.pairs)
          rotate(layer.interleaved, head, cos + t * layer.pairs, sin + t * layer.pairs, head, size, layer.pairs);
      }
    });

  AttentionCall call = fixed;
  (AttentionStep&)call = step;
  call.query = qkv, call.new_keys = qkv + heads * size, call.new_values = qkv + num_rotated * size, call.out = attended;
  call.query_token = call.new_key_token = call.new_value_token = width;
  call.query_head = call.new_key_head = call.new_value_head = size;
  attention(call);

  T* const stream = kept.stream;
  const long num_kept = kept.count < 0 ? tokens : kept.count;
  if (num_kept == 0) return;
  for (long i = 0; i < kept.count; i++) {
    memcpy((void*)(stream + i * hidden), x + kept.rows[i] * hidden, hidden * sizeof(T));
    memmove((void*)(attended + i * layer.out.inner), attended + kept.rows[i] * layer.out.inner,
            layer.out.inner * sizeof(T));
  }
  const int64_t* const kept_batch_rows = kept.batch_rows;

  // stream += multiplier × of_added(added), then added = of_sum(stream), with norms that exist; each result is rounded.
  const auto join = [&](const Norm& of_added, const Norm& of_sum, T* added, long first, long count) {
    parallel_for(share_rows, count, [&](long i) {
      T *row = added + i * hidden, *to = stream + (first + i) * hidden;
      if (of_added.weight) norm_row(of_added, row, row, hidden);
      for (long d = 0; d < hidden; d += LANES) {
        Vec v = load_up_to(row + d, hidden - d);
        if (layer.multiplier != 1.0f) v = rounded_to<T>(v * layer.multiplier);
        store_up_to(to + d, load_up_to(to + d, hidden - d) + v, hidden - d);
      }
      if (of_sum.weight) norm_row(of_sum, to, row, hidden);
    });
  };
  linear(layer.is_bf16, layer.out, {attended, layer.out.inner, normed, hidden, num_kept, nullptr, kept_batch_rows});
  join(layer.post_attention_norm, layer.pre_mlp_norm, normed, 0, num_kept);

  T* const inner = qkv;
  const long inner_width = layer.up.outputs;
  for (long first = 0; first < num_kept; first += chunk) {
    const long count = std::min(chunk, num_kept - first);
    T* const mlp = normed + first * hidden;
    const T* of = layer.pre_mlp_norm.weight ? mlp : stream + first * hidden;
    const int64_t* const rows = kept_batch_rows ? kept_batch_rows + first : nullptr;
    linear(layer.is_bf16, layer.up, {of, hidden, inner, inner_width, count, nullptr, rows});
    parallel_for(count * inner_width >= GRAIN_SIZE / 4, count, [&](long i) {
      T* gate = inner + i * inner_width;
      activate(layer.activation, gate, layer.gated ? gate + layer.down.inner : nullptr, gate, layer.down.inner);
    });
    linear(layer.is_bf16, layer.down, {inner, inner_width, mlp, hidden, count, nullptr, rows});
    join(layer.post_mlp_norm, Norm{}, mlp, first, count);
  }
}

template <class T>
void run_all(const LayerEntry* layers, long count, const AttentionStep* steps, const RopeCosSin* cos_sin, T* x,
             const int64_t* batch_rows, const KeptRows<T>& kept) {
  for (long i = 0; i < count; i++) {
    const LayerEntry& entry = layers[i];
    const RopeCosSin rope = entry.cos_sin < 0 ? RopeCosSin{} : cos_sin[entry.cos_sin];
    const KeptRows<T> all{nullptr, -1, x, batch_rows};
    const KeptRows<T>& rows = i + 1 < count ? all : kept;
    run(*entry.layer, steps[entry.group], x, (const T*)rope.cos, (const T*)rope.sin, batch_rows, rows);
  }
}

}  // namespace

// Runs layers on the residual stream x [tokens, hidden], in place. Unless `kept` is −1, the last layer writes only rows
// `rows` [kept] of its result, to out [kept, hidden]. `batch_rows` [tokens] and `kept_batch_rows` [kept]: see
// LinearArgs; null if no matrix is EXTENDED.
extern "C" void stoker_layers(const LayerEntry* layers, long count, const AttentionStep* steps,
                              const RopeCosSin* cos_sin, void* x, const int64_t* batch_rows, const int64_t* rows,
                              long kept, void* out, const int64_t* kept_batch_rows) {
  const auto run = [&](auto* stream, auto* result) {
    if (kept < 0) result = stream, kept_batch_rows = batch_rows;
    run_all(layers, count, steps, cos_sin, stream, batch_rows, {rows, kept, result, kept_batch_rows});
  };
  if (layers->layer->is_bf16)
    run((bf16*)x, (bf16*)out);
  else
    run((float*)x, (float*)out);
}
