// Browsers start no worker for a page from disk. There, the site's search runs in a frame that answers as a worker would.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const script = `<script src="${new URL(url, location.href).href.replaceAll('"', "%22")}"></` + "script>";
      this.started = new Promise(resolve => {
        window.__fromFrame = data => {
          const event = new MessageEvent("message", {data});
          this.dispatchEvent(event); this.onmessage?.(event);
        };
        this.frame.addEventListener("load", resolve);
        this.frame.srcdoc = "<script>window.postMessage = data => parent.__fromFrame(data)</" + "script>" + script;
      });
      document.body.append(this.frame);
    }
    async postMessage(data) {
      await this.started;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}));
    }
    terminate() { this.frame.remove(); }
  };
}
