#include "gguf/gguf_small.h"

const GGUFOperations* gguf_small(int type) {
  switch (type) {
    case 2: return &gguf_operations<Q4_0>;
    case 3: return &gguf_operations<Q4_1>;
    case 6: return &gguf_operations<Q5_0>;
    case 7: return &gguf_operations<Q5_1>;
    case 8: return &gguf_operations<Q8_0>;
    default: return nullptr;
  }
}
