"""The InferenceEndpoint resource: pydantic models, rules, and the schema generated from them."""
