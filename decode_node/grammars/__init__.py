"""Whether what an answer must conform to compiles in time, found out in a child of the decode replica."""
