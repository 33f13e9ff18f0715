"""Endpoints of OpenAI's API, and vLLM's extensions of it: request and response bodies in their formats."""
