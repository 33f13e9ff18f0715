#include "gguf/gguf_k.h"

const GGUFOperations* gguf_k(int type) {
  switch (type) {
    case 10: return &gguf_operations<Q2_K>;
    case 11: return &gguf_operations<Q3_K>;
    case 12: return &gguf_operations<Q4_K>;
    case 13: return &gguf_operations<Q5_K>;
    case 14: return &gguf_operations<Q6_K>;
    default: return nullptr;
  }
}
