"""How Doorbell's processes start and what machine they stand on."""
