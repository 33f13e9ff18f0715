"""Models written anew with their weights quantized: what ``stoker quantize`` does."""
