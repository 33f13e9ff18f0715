"""How weights are stored and multiplied: one file a storage, behind one seam (`quant.method`)."""
