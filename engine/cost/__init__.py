"""What a step costs, from bytes, operations and named constants: without a GPU. The command is `engine/model_cost.py`."""
