"""What a program will cost: cost model, memory, hardware, layout search, and what the compiler made of it."""
