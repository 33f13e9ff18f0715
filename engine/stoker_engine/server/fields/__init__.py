"""Fields and objects that several APIs have in common: messages, tools, log-probabilities, results."""
