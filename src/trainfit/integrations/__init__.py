"""What connects trainfit with other tools: exporters, importers, and meters of other training loops."""
