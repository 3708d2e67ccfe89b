"""The Shannon Control Unit: its control law, the information in an adapter, and the controller for training."""
