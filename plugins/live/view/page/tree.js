// The tree of cached pages, as minisgl/trace/tree.py has it. It draws nothing.

class Node {
  constructor(parent, pages) {
    Object.assign(this, { parent, pages, children: [], users: 0, step: 0 });
  }
}

export class Tree {
  constructor() {
    this.root = new Node(null, []);
    this.nodeOf = new Map(); // cached page -> its node
  }
  static from(list) {
    const tree = new Tree(), nodes = [];
    for (const [parent, pages, users, step] of list) {
      const node = new Node(parent < 0 ? tree.root : nodes[parent], [...pages]);
      Object.assign(node, { users, step });
      node.parent.children.push(node);
      for (const page of pages) tree.nodeOf.set(page, node);
      nodes.push(node);
    }
    return tree;
  }
  copy() {
    const nodes = this.nodes(), index = new Map(nodes.map((node, i) => [node, i]));
    return Tree.from(nodes.map((node) => [index.get(node.parent) ?? -1, node.pages, node.users, node.step]));
  }
  lock(page, step, users = 1) {
    for (let node = this.endAt(page); node; node = node.parent) {
      node.users += users;
      node.step = step;
    }
  }
  insert(prefix, pages, step) {
    const parent = this.endAt(prefix), node = new Node(parent, [...pages]);
    node.step = step;
    parent.children.push(node);
    for (const page of pages) this.nodeOf.set(page, node);
  }
  evict(pages) {
    const touched = new Set(), gone = new Set(pages);
    for (const page of pages) {
      if (this.nodeOf.has(page)) touched.add(this.nodeOf.get(page));
      this.nodeOf.delete(page);
    }
    for (const node of touched) {
      node.pages = node.pages.filter((page) => !gone.has(page));
      if (!node.pages.length && node.parent) node.parent.children = node.parent.children.filter((each) => each !== node);
    }
  }
  // Every node but the root: a node before its children, older children first.
  nodes() {
    const out = [], visit = (node) => { for (const child of node.children) { out.push(child); visit(child); } };
    visit(this.root);
    return out;
  }
  path(page) {
    let node = this.nodeOf.get(page);
    if (!node) return [];
    let out = node.pages.slice(0, node.pages.indexOf(page) + 1);
    for (node = node.parent; node; node = node.parent) out = [...node.pages, ...out];
    return out;
  }
  endAt(page) {
    const node = page === undefined || page === null ? this.root : this.nodeOf.get(page) || this.root;
    const at = node.pages.length ? node.pages.indexOf(page) + 1 : 0;
    if (at === node.pages.length) return node;
    const upper = new Node(node.parent, node.pages.slice(0, at));
    Object.assign(upper, { users: node.users, step: node.step });
    node.parent.children[node.parent.children.indexOf(node)] = upper;
    upper.children.push(node);
    node.pages = node.pages.slice(at);
    node.parent = upper;
    for (const each of upper.pages) this.nodeOf.set(each, upper);
    return upper;
  }
}
