#include "ops/rotary.h"

#include "common/threads.h"

namespace {

template <class T>
void rotary(bool interleaved, const T* x, long token, long head, const T* cos, const T* sin, T* out, long tokens,
            long heads, long size, long pairs) {
  parallel_for(tokens * heads * size >= GRAIN_SIZE, tokens, [&](long t) {
    for (long h = 0; h < heads; h++)
      rotate(interleaved, x + t * token + h * head, cos + t * pairs, sin + t * pairs, out + (t * heads + h) * size,
             size, pairs);
  });
}

template <class T>
void rope_cos_sin(const int64_t* positions, const float* frequencies, float scale, T* cos, T* sin, long tokens,
                  long pairs) {
  parallel_for(tokens * pairs >= GRAIN_SIZE / 16, tokens, [&](long t) {
    for (long i = 0; i < pairs; i++) {
      const float angle = (float)positions[t] * frequencies[i];
      store_part(cos + t * pairs + i, broadcast(cosf(angle) * scale), 1);
      store_part(sin + t * pairs + i, broadcast(sinf(angle) * scale), 1);
    }
  });
}

}  // namespace

// x [tokens, heads, size], tokens and heads `token` and `head` elements apart; cos and sin [tokens, pairs] and out
// [tokens, heads, size] are contiguous.
extern "C" void stoker_rotary(int is_bf16, int interleaved, const void* x, long token, long head, const void* cos,
                              const void* sin, void* out, long tokens, long heads, long size, long pairs) {
  if (is_bf16)
    rotary(interleaved, (const bf16*)x, token, head, (const bf16*)cos, (const bf16*)sin, (bf16*)out, tokens, heads,
           size, pairs);
  else
    rotary(interleaved, (const float*)x, token, head, (const float*)cos, (const float*)sin, (float*)out, tokens, heads,
           size, pairs);
}

// Computes cos and sin [tokens, pairs] of position × frequency, times `scale`.
extern "C" void stoker_rope_cos_sin(int is_bf16, const int64_t* positions, const float* frequencies, float scale,
                                    void* cos, void* sin, long tokens, long pairs) {
  if (is_bf16)
    rope_cos_sin(positions, frequencies, scale, (bf16*)cos, (bf16*)sin, tokens, pairs);
  else
    rope_cos_sin(positions, frequencies, scale, (float*)cos, (float*)sin, tokens, pairs);
}
