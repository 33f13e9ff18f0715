"""The validating webhook: admission reviews, and the certificate of its server."""
