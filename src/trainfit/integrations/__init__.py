"""What connects trainfit with other tools."""
