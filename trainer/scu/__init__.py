"""The Shannon Control Unit: its control law, the measure of an adapter's information, and the training controller."""
