"""Models: decoders built from the parts of their family, and the Transformers backend."""
