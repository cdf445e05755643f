"""HTTP: OpenAI's and Anthropic's interfaces over one engine and one pool."""
