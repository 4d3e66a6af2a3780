"""`--device cuda`: torch for memory and large products, Triton for everything that a decode step does."""
