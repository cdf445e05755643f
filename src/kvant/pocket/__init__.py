"""The pocket model: a 3-million-parameter teller of small stories, in the Hugging Face form."""
