"""Models written again with their weights quantized: what ``stoker quantize`` does."""
