"""The Shannon Control Unit: its law, the information of an adapter, the controller in training."""
