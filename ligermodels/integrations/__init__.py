"""Code that uses other libraries, such as transformers. No other room imports them."""
