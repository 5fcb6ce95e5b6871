"""Old names, for one release. Extensions import `spec_lab.extend`."""
