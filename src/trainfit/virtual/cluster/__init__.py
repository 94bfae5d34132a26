"""The virtual cluster: one rank of many on the virtual GPU, over torch's ``fake`` process group."""
