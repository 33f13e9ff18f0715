"""From logits to tokens: masks, draws, argmax, log-probabilities."""
