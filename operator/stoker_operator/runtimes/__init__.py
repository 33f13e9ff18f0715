"""The runtimes that an endpoint may use, stoker and vllm: one module each, with the interface `Runtime`."""
