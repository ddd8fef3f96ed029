"""What binds a compiled kernel: its machine code (SASS), walked as the warps of one program walk it, and counted."""
