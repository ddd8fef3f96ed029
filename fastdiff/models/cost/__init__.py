"""What a step costs: floating-point operations and bytes."""
