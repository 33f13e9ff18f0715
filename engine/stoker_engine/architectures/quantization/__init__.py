"""How a checkpoint's weights are quantized, read from its config.json: a file a method."""
