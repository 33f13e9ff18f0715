"""The operator: turns InferenceEndpoint resources into pods that serve a model."""
