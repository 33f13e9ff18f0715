// Memory that is kept between calls, since new memory costs a page fault for every 4 KiB.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

class Memory {
 public:
  // Returns at least `bytes` uninitialized bytes, valid until the next call.
  char* of(size_t bytes) {
    if (bytes > size_) {
      size_ = 0;
      at_.reset();
      at_.reset(new (std::align_val_t(64)) char[bytes]);
      size_ = bytes;
    }
    return at_.get();
  }

 private:
  struct Free {
    void operator()(char* at) const { ::operator delete[](at, std::align_val_t(64)); }
  };
  std::unique_ptr<char[], Free> at_;
  size_t size_ = 0;
};
