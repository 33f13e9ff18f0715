"""The engine as the server sees it: generating, loading it again, stopping, turning requests away."""
