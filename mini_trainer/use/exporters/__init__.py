"""A model directory -> files of other programs: GGUF, which llama.cpp and Ollama read."""
