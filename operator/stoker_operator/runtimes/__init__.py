"""The engines that an endpoint may run: one module each, with one interface (`runtime.Runtime`). Pure."""
