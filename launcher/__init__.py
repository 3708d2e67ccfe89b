"""The command line and launcher of zerolora; without torch, so that every command responds at once."""
