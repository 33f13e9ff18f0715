"""Export of models with quantized weights (``stoker quantize``)."""
