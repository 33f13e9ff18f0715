"""Storage formats of weight matrices and their linear operations; `quant.method` defines the interface."""
