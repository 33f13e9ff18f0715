"""The endpoints of OpenAI's API and vLLM's beside them: requests by name, answers in their shapes."""
