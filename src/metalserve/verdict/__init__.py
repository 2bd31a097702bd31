"""May a host serve its deployments? The answer of one host is in `host`, that of a fleet in `fleet`."""
