"""A load test of an OpenAI-compatible endpoint: so many requests at a time, step by step."""
