"""Forward passes that vLLM has compiled piece by piece, stopped and resumed between the pieces."""
